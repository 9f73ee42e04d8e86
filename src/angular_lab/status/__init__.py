"""What a person sees of a run while it trains, and where its time goes. No torch here."""
