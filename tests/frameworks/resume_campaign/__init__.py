"""The trainings of tests/integration/resume_campaign.py, one file for each framework."""
