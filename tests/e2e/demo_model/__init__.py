"""Tests of one cluster; a package, because its fixture has the scope of one."""
