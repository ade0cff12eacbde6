"""stub"""

OPERATIONS = []
