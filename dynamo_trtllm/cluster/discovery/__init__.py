"""Discovery: workers register their instances under a lease, and frontends watch them."""
