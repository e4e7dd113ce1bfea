"""What is known of chips and machines."""
