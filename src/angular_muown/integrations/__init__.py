"""One file for each host framework; importing one imports its framework, `angular_muown` none."""
