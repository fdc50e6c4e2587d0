"""What a probe found: records that make reports of themselves."""
