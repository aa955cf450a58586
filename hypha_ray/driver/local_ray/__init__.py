"""A Ray of a job's own on this machine, which starts while the driver loads libraries and checks the job."""
