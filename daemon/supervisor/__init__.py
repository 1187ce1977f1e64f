"""The daemon's side of its service manager: systemd(1), or one like it."""
