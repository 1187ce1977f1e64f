"""What both faces share. Nothing here waits: procedures are generators that yield what they have to wait for."""
