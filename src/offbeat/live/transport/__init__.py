"""Between processes: who is there, who waits, how bytes and facts travel, how things end."""
