"""Connect the processes: discovery over etcd, and requests and token streams over NATS."""
