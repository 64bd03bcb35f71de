"""What can be asked: typed models, Protocols and routers, one folder per API. Imports nothing of ours."""
