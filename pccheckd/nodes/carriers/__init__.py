"""What moves small values between the nodes of a job."""
