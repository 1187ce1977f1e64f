"""What the daemon and the service manager that started it say to each other: systemd(1), or one like it."""
