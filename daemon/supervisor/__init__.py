"""The daemon's communication with its service manager: systemd(1), or a similar one."""
