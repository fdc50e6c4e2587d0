"""A probe while it runs: it opens a session, which answers the search, and closes with a result."""
