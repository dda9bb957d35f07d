"""Optional ideas, one file each. The core never imports anything from here."""
