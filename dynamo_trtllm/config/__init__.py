"""Configuration: the models, and the one loader that reads argv, environment and YAML. Decides nothing else."""
