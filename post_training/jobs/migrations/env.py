"""What Alembic runs for each command: the steps, in the transaction that the caller opened."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], render_as_batch=True)
context.run_migrations()
