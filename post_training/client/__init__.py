"""What users import to talk to a stack."""
