"""What-ifs handed out: tables as CSV, a report that stands by itself, and what comes of the future that is the plan."""
