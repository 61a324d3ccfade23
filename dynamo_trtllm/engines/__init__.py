"""Inference engines, which turn token ids into token ids.

Each engine has a folder of its own and uses no network.
"""
