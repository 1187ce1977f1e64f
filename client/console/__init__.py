"""Code for operators' programs: exit statuses, checked reports, tables, and daemons that end with their program."""
