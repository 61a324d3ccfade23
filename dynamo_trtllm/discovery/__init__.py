"""Who is there: instances registered under a lease, watched by frontends. Knows keys and records, no routing."""
