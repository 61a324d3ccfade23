"""Run the real router, request flow, limits and mock scheduler in virtual time."""
