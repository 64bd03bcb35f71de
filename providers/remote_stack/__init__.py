"""remote::llama-stack: post-training on another server, a Postgrad or a Llama Stack up to 0.6.1."""
