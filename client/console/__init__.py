"""Code of programs for operators: exit statuses, checked reports, tables, and daemons that end with their program."""
