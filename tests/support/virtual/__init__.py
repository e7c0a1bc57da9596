"""The control plane's own code in virtual time: routers, agents and gateways as they run, over links, a store and engines that
are made up, so that every fault can be had at every moment, and again by its seed."""
