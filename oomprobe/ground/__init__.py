"""What everything stands on: words and units, the line of the user, the system, versions of torch."""
