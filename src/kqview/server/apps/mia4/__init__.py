"""MIA4: a chat front with several models, passports, presets and conversations."""
