"""What both HTTP servers share."""
