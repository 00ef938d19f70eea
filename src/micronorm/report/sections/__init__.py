"""What a page tells, a module per section: each takes the runs and how much detail to show, and gives a Section."""
