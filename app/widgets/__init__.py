"""What several rooms of the page show or offer."""
