"""Configuration: settings of all commands, and their loader, which reads argv, environment and
YAML.
"""
