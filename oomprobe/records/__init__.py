"""What is passed on: trials, options, results, tables, plans. Only results and tables render themselves."""
