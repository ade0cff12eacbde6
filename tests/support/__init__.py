"""What tests share: models made on the spot, and references for captured attention."""
