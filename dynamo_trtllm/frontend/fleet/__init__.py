"""Know the fleet: the models that workers serve, probes of their pairs, and readiness."""
