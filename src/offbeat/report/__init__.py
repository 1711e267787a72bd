"""What people read: tables, plots, pages. Made from records of runs, never from a runtime."""
