"""Pictures of attention. Importing this package pulls in no drawing library."""
