"""Who is waited for, who answers for whom, and what becomes of late work: no clock, no network, no thread."""
