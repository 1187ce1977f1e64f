"""Code of programs for operators: exit statuses, checked reports, tables, daemons that end with their program."""
