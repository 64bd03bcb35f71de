"""What is asked for and how far it is: store, states, scheduler, launchers. No torch."""
