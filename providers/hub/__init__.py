"""remote::huggingface: data sets of the Hugging Face hub."""
