"""What-ifs handed out: tables as CSV, and a report that stands by itself."""
