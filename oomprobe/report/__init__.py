"""What people read: text, pages, pictures, and progress while a probe runs."""
