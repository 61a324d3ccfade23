"""The console: a page that shows the deployment live, and the data that it shows."""
