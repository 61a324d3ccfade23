"""What the frontend and the request plane cost a token, ours alone or beside Dynamo. See docs/performance.md."""
