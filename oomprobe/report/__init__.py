"""What people read: the report, live progress, plans, the line through the peaks."""
