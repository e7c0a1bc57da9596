"""The control plane's own code in virtual time: routers, agents and gateways over simulated links, store and engines. Any fault
can occur at any moment, and a seed reproduces it."""
