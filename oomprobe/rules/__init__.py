"""What decides, without torch and without memory: the search, how long trials are, what trials say about the step."""
