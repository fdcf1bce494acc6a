"""`pccheckctl import`: files of other software as the first checkpoint of a new job."""
