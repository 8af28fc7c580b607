"""What operators run beside the daemon: status, transfers, healthcheck, drain, doctor, keys."""
