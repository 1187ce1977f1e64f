"""What programs for operators share: exit statuses, checked reports, tables, daemons that end with their program."""
