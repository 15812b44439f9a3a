"""Every method of the papers on one data set: the runs, their results on disk, and a report."""
