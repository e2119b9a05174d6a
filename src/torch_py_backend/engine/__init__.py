"""A loaded model: which stages its pipeline has, its device, and what is compiled."""
